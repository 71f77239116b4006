# bench/*.cpp: one executable each, on Google Benchmark where the file includes it.
find_package(benchmark REQUIRED)
# The cases of operations are those of the conformance tests.
add_library(orrery_cases STATIC ${PROJECT_SOURCE_DIR}/tests/conformance/cases.cpp)
orrery_own(orrery_cases)
target_include_directories(orrery_cases PUBLIC ${PROJECT_SOURCE_DIR}/tests)
target_link_libraries(orrery_cases PUBLIC orrery_backend)
file(GLOB benches CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/bench/*.cpp)
foreach(source ${benches})
  get_filename_component(name ${source} NAME_WE)
  add_executable(${name} ${source})
  orrery_own(${name})
  target_link_libraries(${name} PRIVATE orrery_cases orrery_bench orrery_compare
                         benchmark::benchmark DNNL::dnnl)
endforeach()
