# unit_<layer> from src/<layer>/*_test.cpp, conformance, orrery_golden_test, end-to-end tests and fuzz
# targets (tests/fuzz/*_fuzz.cpp; without libFuzzer they replay their corpus as ordinary tests).
find_package(GTest REQUIRED)

set(ORRERY_TEST_ENV
    "ORRERY_SOURCE_DIR=${PROJECT_SOURCE_DIR}"
    "ORRERY_BINARY=${CMAKE_BINARY_DIR}/orrery")

# The one object that knows the path of the tree: the others compile alike in every folder.
add_library(orrery_test_support STATIC ${PROJECT_SOURCE_DIR}/tests/support/source_dir.cpp)
target_include_directories(orrery_test_support PUBLIC ${PROJECT_SOURCE_DIR}/tests)
target_compile_definitions(orrery_test_support PRIVATE ORRERY_BUILT_FROM="${PROJECT_SOURCE_DIR}")

function(orrery_test name label)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS;LIBS" ${ARGN})
  if(NOT ARG_SOURCES)
    return()
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE orrery_options orrery_test_support GTest::gtest GTest::gtest_main ${ARG_LIBS})
  foreach(dep ${ARG_DEPS})
    target_link_libraries(${name} PRIVATE orrery_${dep})
  endforeach()
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS ${label} ENVIRONMENT "${ORRERY_TEST_ENV}" TIMEOUT 1800)
endfunction()

# Plans are tested by running them.
set(attention_test_deps cpu)
set(model_test_deps cpu)
set(engine_test_deps published)
foreach(layer base tensor backend cpu dist io text attention model engine)
  file(GLOB tests CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${layer}/*_test.cpp)
  orrery_test(unit_${layer} unit SOURCES ${tests} DEPS ${layer} ${${layer}_test_deps})
endforeach()

file(GLOB tests CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/apps/*/*_test.cpp)
orrery_test(unit_tools unit SOURCES ${tests} DEPS compare published)

file(GLOB conformance CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/conformance/*.cpp
     ${PROJECT_SOURCE_DIR}/tests/reference/*.cpp)
orrery_test(conformance unit SOURCES ${conformance} DEPS backend cpu cuda)

# On a GPU: conformance without the CPU backend, so that it needs no OpenMP, and what only
# the CUDA backend has.
if(ORRERY_CUDA)
  file(GLOB device CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/device/*.cpp)
  orrery_test(device_test device SOURCES ${device} ${conformance} DEPS attention cuda)
  # Ranks on two GPUs.
  file(GLOB device_mesh CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/device_mesh/*.cpp)
  orrery_test(device_mesh_test device SOURCES ${device_mesh} DEPS published)
endif()

file(GLOB golden CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/golden/*.cpp)
orrery_test(orrery_golden_test golden SOURCES ${golden} DEPS engine)

file(GLOB dist CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/dist/*.cpp)
orrery_test(dist_test dist SOURCES ${dist} DEPS bench)

file(GLOB e2e CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/e2e/*.cpp)
orrery_test(e2e_test e2e SOURCES ${e2e} DEPS engine)

file(GLOB fuzzers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/fuzz/*_fuzz.cpp)
foreach(source ${fuzzers})
  get_filename_component(name ${source} NAME_WE)
  add_executable(${name} ${source})
  target_link_libraries(${name} PRIVATE orrery_options orrery_engine)
  if(ORRERY_FUZZ)
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    set(arguments -runs=0)
  else()
    target_sources(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests/fuzz/replay.cpp)
    set(arguments)
  endif()
  string(REPLACE "_fuzz" "" corpus ${name})
  add_test(NAME ${name} COMMAND ${name} ${arguments} ${PROJECT_SOURCE_DIR}/tests/fuzz/corpus/${corpus})
  set_tests_properties(${name} PROPERTIES LABELS fuzz)
endforeach()

# Structured mutations of everything that is read; a short run is a test, a long one a command.
add_executable(mutation_run ${PROJECT_SOURCE_DIR}/tests/fuzz/mutation_run.cpp)
target_link_libraries(mutation_run PRIVATE orrery_options orrery_test_support orrery_engine)
add_test(NAME mutation_run COMMAND mutation_run 330)
set_tests_properties(mutation_run PROPERTIES LABELS fuzz ENVIRONMENT "${ORRERY_TEST_ENV}" TIMEOUT 1800)

# What a script can hold against the tree: include directions, and pages whose tables are measured lines.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
foreach(check "check_layers" "results_table --check" "strategy_table --check")
  separate_arguments(words UNIX_COMMAND ${check})
  list(POP_FRONT words name)
  add_test(NAME ${name} COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/${name}.py ${words})
  set_tests_properties(${name} PROPERTIES LABELS unit)
endforeach()
