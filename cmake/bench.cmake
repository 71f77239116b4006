# bench/*.cpp: one executable each, on Google Benchmark where the file includes it.
find_package(benchmark REQUIRED)
file(GLOB benches CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/bench/*.cpp)
foreach(source ${benches})
  get_filename_component(name ${source} NAME_WE)
  add_executable(${name} ${source})
  target_link_libraries(${name} PRIVATE orrery_bench orrery_compare orrery_options orrery_engine benchmark::benchmark dnnl)
endforeach()
