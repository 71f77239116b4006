# The library as others use it. The example is built from an install tree by find_package, by
# pkg-config and on the static library, and with Orrery as a subdirectory.
set(prefix ${PROJECT_BINARY_DIR}/package/prefix)
set(example ${PROJECT_SOURCE_DIR}/examples/embed/main.cpp)
set(checkpoint ${prefix}/share/orrery/models/cosmos3-pico)
set(options -DCMAKE_BUILD_TYPE=${CMAKE_BUILD_TYPE} -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}
    -DCMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER} -DCMAKE_PREFIX_PATH=${prefix}
    -DORRERY_CUDA=${ORRERY_WITH_CUDA} -DORRERY_NCCL=${ORRERY_WITH_NCCL})

add_test(NAME package.install
         COMMAND ${CMAKE_COMMAND} --install ${PROJECT_BINARY_DIR} --prefix ${prefix})
set_tests_properties(package.install PROPERTIES FIXTURES_SETUP prefix)

# orrery_package_test(NAME SOURCE PROGRAM options...): builds SOURCE, makes a clip with PROGRAM.
function(orrery_package_test name source program)
  set(folder ${PROJECT_BINARY_DIR}/package/${name})
  add_test(NAME package.${name}
    COMMAND ${CMAKE_CTEST_COMMAND} --build-and-test ${PROJECT_SOURCE_DIR}/${source} ${folder}
            --build-generator ${CMAKE_GENERATOR} --build-target ${program}
            --build-options ${options} ${ARGN}
            --test-command ${folder}/${program} ${checkpoint} ${folder}/clip.mp4)
endfunction()
orrery_package_test(find_package examples/embed embed)
orrery_package_test(static tests/package/static embed_static)
orrery_package_test(subdirectory tests/package/subdirectory embed_subdirectory)
# A library without FFmpeg refuses the clip with a sentence.
orrery_package_test(no_media tests/package/subdirectory embed_subdirectory -DORRERY_MEDIA=OFF)
set_tests_properties(package.no_media PROPERTIES PASS_REGULAR_EXPRESSION "this build has no FFmpeg")

add_test(NAME package.pkg_config
  COMMAND sh -ec "${CMAKE_CXX_COMPILER} -std=c++20 ${example} -o ${prefix}/embed \
$(pkg-config --cflags --libs orrery) -Wl,-rpath,$(pkg-config --variable=libdir orrery)
${prefix}/embed ${checkpoint} ${prefix}/clip.mp4")
set_tests_properties(package.pkg_config PROPERTIES
  ENVIRONMENT PKG_CONFIG_PATH=${prefix}/${CMAKE_INSTALL_LIBDIR}/pkgconfig)

file(GLOB public CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/orrery/*.h)
add_test(NAME package.exports
  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tests/package/check_exports.py
          $<TARGET_FILE:orrery_shared> ${public} ${PROJECT_BINARY_DIR}/include/orrery/version.h)

set(programs package.find_package package.static package.subdirectory package.no_media
    package.pkg_config)
set_tests_properties(${programs} PROPERTIES FIXTURES_REQUIRED prefix)
set_tests_properties(package.install ${programs} package.exports
                     PROPERTIES LABELS slow TIMEOUT 1800)
# Every public header compiles by itself.
add_custom_target(orrery_public_headers ALL)
add_dependencies(orrery_public_headers orrery_shared_verify_interface_header_sets)
