# Tests are named PROGRAM.SUITE.TEST, or PROGRAM.SUITE where a suite's tests share what is costly to
# set up, and labelled fast or slow: `ctest --preset fast` is for every edit.
#   unit_<layer>         src/<layer>/*_test.cpp
#   conformance          every operation of every backend against double precision
#   orrery_golden_test, dist_test, e2e_test    tests/golden, tests/dist, tests/e2e
#   *_fuzz               tests/fuzz/*_fuzz.cpp; without libFuzzer they replay their corpus
#   package              the installed library
#   check_*              what a script can hold against the tree
find_package(GTest REQUIRED)
include(GoogleTest)

# The one object that knows the path of the tree: the others compile alike in every folder.
add_library(orrery_test_support STATIC ${PROJECT_SOURCE_DIR}/tests/support/source_dir.cpp)
orrery_own(orrery_test_support)
target_include_directories(orrery_test_support PUBLIC ${PROJECT_SOURCE_DIR}/tests)
target_compile_definitions(orrery_test_support PRIVATE ORRERY_BUILT_FROM="${PROJECT_SOURCE_DIR}")

# orrery_test_program(NAME SOURCES files... DEPS layers and tools...)
function(orrery_test_program name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  orrery_own(${name})
  target_link_libraries(${name} PRIVATE orrery_test_support GTest::gtest GTest::gtest_main)
  foreach(dep ${ARG_DEPS})
    target_link_libraries(${name} PRIVATE orrery_${dep})
  endforeach()
endfunction()

# A program of fast tests, one entry each.
function(orrery_fast_tests name)
  orrery_test_program(${name} ${ARGN})
  gtest_discover_tests(${name} TEST_PREFIX ${name}. DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 120
                       PROPERTIES LABELS fast TIMEOUT 600)
endfunction()

# A program of slow tests, one entry a suite.
function(orrery_slow_tests name)
  orrery_test_program(${name} ${ARGN})
  set(file ${CMAKE_CURRENT_BINARY_DIR}/${name}_suites.cmake)
  file(GENERATE OUTPUT ${file} CONTENT "set(NAME ${name})\nset(EXECUTABLE $<TARGET_FILE:${name}>)
set(ENVIRONMENT ORRERY_BINARY=${CMAKE_CURRENT_BINARY_DIR}/orrery)
include(${PROJECT_SOURCE_DIR}/cmake/add_suites.cmake)\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${file})
endfunction()

# Plans are tested by running them.
set(attention_test_deps cpu)
set(model_test_deps cpu)
set(engine_test_deps published)
foreach(layer ${ORRERY_LAYERS})
  file(GLOB tests CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${layer}/*_test.cpp)
  if(tests)
    orrery_fast_tests(unit_${layer} SOURCES ${tests} DEPS ${layer} ${${layer}_test_deps})
  endif()
endforeach()
file(GLOB tests CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/apps/*/*_test.cpp)
orrery_fast_tests(unit_tools SOURCES ${tests} DEPS compare published)

file(GLOB conformance CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/conformance/*.cpp
     ${PROJECT_SOURCE_DIR}/tests/reference/*.cpp)
orrery_slow_tests(conformance SOURCES ${conformance} DEPS backend cpu cuda)

foreach(folder golden dist e2e)
  file(GLOB ${folder} CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/${folder}/*.cpp)
endforeach()
orrery_slow_tests(orrery_golden_test SOURCES ${golden} DEPS engine)
orrery_slow_tests(dist_test SOURCES ${dist} DEPS bench)
orrery_slow_tests(e2e_test SOURCES ${e2e} DEPS engine)

# On a GPU: conformance without the CPU backend, so that it needs no OpenMP, and what only the CUDA
# backend has; and ranks on two GPUs.
if(ORRERY_WITH_CUDA)
  foreach(folder device device_mesh)
    file(GLOB ${folder} CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/${folder}/*.cpp)
  endforeach()
  orrery_slow_tests(device_test SOURCES ${device} ${conformance} DEPS attention cuda)
  orrery_slow_tests(device_mesh_test SOURCES ${device_mesh} DEPS published)
endif()

file(GLOB fuzzers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/fuzz/*_fuzz.cpp)
foreach(source ${fuzzers})
  get_filename_component(name ${source} NAME_WE)
  add_executable(${name} ${source})
  orrery_own(${name})
  target_link_libraries(${name} PRIVATE orrery_engine)
  if(ORRERY_FUZZ)
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    set(arguments -runs=0)
  else()
    target_sources(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests/fuzz/replay.cpp)
    set(arguments)
  endif()
  string(REPLACE "_fuzz" "" corpus ${name})
  add_test(NAME ${name}
           COMMAND ${name} ${arguments} ${PROJECT_SOURCE_DIR}/tests/fuzz/corpus/${corpus})
  set_tests_properties(${name} PROPERTIES LABELS fast)
endforeach()

# Structured mutations of everything that is read; a short run is a test, a long one a command.
add_executable(mutation_run ${PROJECT_SOURCE_DIR}/tests/fuzz/mutation_run.cpp)
orrery_own(mutation_run)
target_link_libraries(mutation_run PRIVATE orrery_test_support orrery_engine)
add_test(NAME mutation_run COMMAND mutation_run 330)
set_tests_properties(mutation_run PROPERTIES LABELS slow TIMEOUT 1800)

# What a script can hold against the tree: include directions, pages whose tables are measured
# lines, the format.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
foreach(check "check_layers" "results_table --check" "strategy_table --check" "check_format")
  separate_arguments(words UNIX_COMMAND ${check})
  list(POP_FRONT words name)
  add_test(NAME ${name}
           COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/${name}.py ${words})
  set_tests_properties(${name} PROPERTIES LABELS fast SKIP_RETURN_CODE 77)
endforeach()

if(ORRERY_INSTALL AND ORRERY_PROGRAM AND NOT ORRERY_SANITIZE)
  include(cmake/package_tests.cmake)
endif()
