# Read by ctest: one slow test for each suite of EXECUTABLE, named NAME.SUITE. Suites share what is costly
# to set up, so that their tests stay in one process.
if(NOT EXISTS ${EXECUTABLE})
  add_test(${NAME}_NOT_BUILT ${EXECUTABLE})
  return()
endif()
execute_process(COMMAND ${EXECUTABLE} --gtest_list_tests OUTPUT_VARIABLE listing
                COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "(^|\n)[^ \n]+\\." suites "${listing}")
foreach(suite ${suites})
  string(REGEX REPLACE "^\n|\\.$" "" suite "${suite}")
  add_test(${NAME}.${suite} ${EXECUTABLE} --gtest_filter=${suite}.*)
  set_tests_properties(${NAME}.${suite} PROPERTIES LABELS slow TIMEOUT 1800
                       ENVIRONMENT "${ENVIRONMENT}")
endforeach()
