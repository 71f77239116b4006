# The library as others see it: orrery::orrery (shared) and orrery::static, made of the objects of
# all layers. Only what include/orrery declares is exported.
include(GNUInstallDirs)

configure_file(${PROJECT_SOURCE_DIR}/cmake/version.h.in
               ${PROJECT_BINARY_DIR}/include/orrery/version.h @ONLY)
file(GLOB headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/orrery/*.h)

# Facts of the build, the commit among them: looked up whenever something is built.
add_custom_target(orrery_build_facts
  COMMAND ${CMAKE_COMMAND} -D SOURCE=${PROJECT_SOURCE_DIR}
          -D OUTPUT=${PROJECT_BINARY_DIR}/include/orrery_build.h -D MEDIA=${ORRERY_WITH_MEDIA}
          -D MPI=${ORRERY_WITH_MPI} -D CUDA=${ORRERY_WITH_CUDA} -D NCCL=${ORRERY_WITH_NCCL}
          -D CUDA_VERSION=${CUDAToolkit_VERSION} -D DNNL_INCLUDE=${DNNL_INCLUDE}
          -P ${PROJECT_SOURCE_DIR}/cmake/build_facts.cmake
  BYPRODUCTS ${PROJECT_BINARY_DIR}/include/orrery_build.h COMMENT "" VERBATIM)
add_dependencies(orrery_base orrery_build_facts)

add_library(orrery_shared SHARED)
add_library(orrery_static STATIC)
add_library(orrery::orrery ALIAS orrery_shared)
add_library(orrery::static ALIAS orrery_static)
foreach(library orrery_shared orrery_static)
  foreach(layer ${ORRERY_LAYERS})
    target_sources(${library} PRIVATE $<TARGET_OBJECTS:orrery_${layer}>)
  endforeach()
  target_sources(${library} PUBLIC FILE_SET HEADERS
    BASE_DIRS ${PROJECT_SOURCE_DIR}/include ${PROJECT_BINARY_DIR}/include
    FILES ${headers} ${PROJECT_BINARY_DIR}/include/orrery/version.h)
  target_compile_features(${library} PUBLIC cxx_std_20)
  target_link_libraries(${library} PRIVATE ${ORRERY_LIBRARIES})
  set_target_properties(${library} PROPERTIES OUTPUT_NAME orrery LINKER_LANGUAGE CXX)
endforeach()
set_target_properties(orrery_shared PROPERTIES EXPORT_NAME orrery VERSION ${PROJECT_VERSION}
  SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR} INSTALL_RPATH_USE_LINK_PATH ON
  VERIFY_INTERFACE_HEADER_SETS ON)
set_target_properties(orrery_static PROPERTIES EXPORT_NAME static)
if(ORRERY_SANITIZE)
  target_link_options(orrery_shared PRIVATE -fsanitize=${ORRERY_SANITIZE})
endif()
# Hidden visibility leaves the standard library's templates visible; the map hides those, too.
set(map ${PROJECT_SOURCE_DIR}/cmake/orrery.map)
target_link_options(orrery_shared PRIVATE -Wl,--version-script=${map})
set_target_properties(orrery_shared PROPERTIES LINK_DEPENDS ${map})
