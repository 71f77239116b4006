# Targets of the tree: layers, tools and programs, and the settings that all of them share.
find_package(nlohmann_json 3.11 REQUIRED)

set(ORRERY_WARNINGS -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  list(APPEND ORRERY_WARNINGS -Wno-restrict)  # a false alarm of GCC 12 on std::string (GCC bug 105651)
endif()
if(ORRERY_WERROR)
  list(APPEND ORRERY_WARNINGS -Werror)
endif()

# Linked PRIVATE by every target of the tree: it does not reach who uses the library.
add_library(orrery_private INTERFACE)
target_compile_features(orrery_private INTERFACE cxx_std_20)
target_compile_options(orrery_private INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${ORRERY_WARNINGS}>)
target_include_directories(orrery_private INTERFACE
  ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src ${PROJECT_BINARY_DIR}/include)
target_link_libraries(orrery_private INTERFACE Threads::Threads)
if(ORRERY_SANITIZE)
  target_compile_options(orrery_private INTERFACE -fsanitize=${ORRERY_SANITIZE}
                         -fno-omit-frame-pointer -g)
  target_link_options(orrery_private INTERFACE -fsanitize=${ORRERY_SANITIZE})
endif()
if(ORRERY_FUZZ)
  target_compile_options(orrery_private INTERFACE -fsanitize=fuzzer-no-link)
endif()

# orrery_own(TARGET): the settings of a target of the tree.
function(orrery_own target)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON
                        CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_link_libraries(${target} PRIVATE orrery_private)
endfunction()

# orrery_layer(NAME layers...): a static library from src/NAME/*.cpp that links the named layers.
# File names say what is compiled:
#   X_test.cpp          a test, elsewhere
#   absent_FEATURE.cpp  only without the feature, and FEATURE_X.cpp only with it
#   absent.cpp          in the layer named as a feature: this file alone without the feature
#   X_avx2.cpp          for that instruction set, chosen at run time
function(orrery_layer name)
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${name}/*.cpp)
  list(FILTER sources EXCLUDE REGEX "_test\\.cpp$")
  foreach(feature media mpi cuda nccl)
    string(TOUPPER ${feature} upper)
    if(ORRERY_WITH_${upper})
      list(FILTER sources EXCLUDE REGEX "/absent_${feature}\\.cpp$")
    else()
      list(FILTER sources EXCLUDE REGEX "/${feature}_[^/]*\\.cpp$")
    endif()
    if(name STREQUAL feature AND ORRERY_WITH_${upper})
      list(FILTER sources EXCLUDE REGEX "/absent\\.cpp$")
    elseif(name STREQUAL feature)
      list(FILTER sources INCLUDE REGEX "/absent\\.cpp$")
    endif()
  endforeach()
  add_library(orrery_${name} STATIC ${sources})
  orrery_own(orrery_${name})
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    foreach(source ${sources})
      if(source MATCHES "_avx2\\.cpp$")
        set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "-march=x86-64-v3")
      elseif(source MATCHES "_avx512\\.cpp$")
        set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS
                                    "-march=x86-64-v4;-mprefer-vector-width=512")
      endif()
    endforeach()
  endif()
  foreach(dep ${ARGN})
    target_link_libraries(orrery_${name} PUBLIC orrery_${dep})
  endforeach()
endfunction()

# A target for each line of src/layers.txt; ORRERY_LAYERS lists them.
function(orrery_layers)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/layers.txt)
  file(STRINGS ${PROJECT_SOURCE_DIR}/src/layers.txt lines REGEX "^[a-z]")
  foreach(line ${lines})
    separate_arguments(words UNIX_COMMAND ${line})
    orrery_layer(${words})
    list(POP_FRONT words name)
    list(APPEND names ${name})
  endforeach()
  set(ORRERY_LAYERS ${names} PARENT_SCOPE)
endfunction()

# Adds the kernels to the CUDA layer.
macro(orrery_cuda_kernels)
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a)
  endif()
  enable_language(CUDA)
  # CMake 3.25 does not know that nvcc speaks C++20.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  # One runtime library in a program: NCCL's layer links the shared one too.
  set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
  file(GLOB kernels CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/kernels/*.cu)
  target_sources(orrery_cuda PRIVATE ${kernels})
  set_target_properties(orrery_cuda PROPERTIES CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON
                        CUDA_RUNTIME_LIBRARY Shared CUDA_VISIBILITY_PRESET hidden)
  target_include_directories(orrery_cuda PRIVATE ${CUDNN_INCLUDE})
  target_link_libraries(orrery_cuda PRIVATE CUDA::cudart ${CUBLASLT_LIBRARY} ${CUDNN_LIBRARY})
endmacro()

# orrery_tool(NAME DEPS layers and tools...): one static library from apps/NAME/*.cpp.
function(orrery_tool name)
  cmake_parse_arguments(ARG "" "" "DEPS" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/apps/${name}/*.cpp)
  list(FILTER sources EXCLUDE REGEX "_test\\.cpp$")
  add_library(orrery_${name} STATIC ${sources})
  orrery_own(orrery_${name})
  target_include_directories(orrery_${name} PUBLIC ${PROJECT_SOURCE_DIR}/apps)
  foreach(dep ${ARG_DEPS})
    target_link_libraries(orrery_${name} PUBLIC orrery_${dep})
  endforeach()
endfunction()

function(orrery_executable name folder)
  cmake_parse_arguments(ARG "" "" "DEPS;LIBS" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${folder}/*.cpp)
  list(FILTER sources EXCLUDE REGEX "_test\\.cpp$")
  add_executable(${name} ${sources})
  orrery_own(${name})
  target_link_libraries(${name} PRIVATE ${ARG_LIBS})
  foreach(dep ${ARG_DEPS})
    target_link_libraries(${name} PRIVATE orrery_${dep})
  endforeach()
endfunction()
