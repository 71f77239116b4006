# What `cmake --install` brings: program, library, headers, package files, recipes and the shipped
# checkpoint.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/orrery)
set(data_dir ${CMAKE_INSTALL_DATADIR}/orrery)

# The shared and the static library are two exports: only who asks for the static one needs the
# development files of what it links.
foreach(kind shared static)
  install(TARGETS orrery_${kind} EXPORT orrery_${kind} FILE_SET HEADERS)
  install(EXPORT orrery_${kind} NAMESPACE orrery:: FILE orrery-${kind}.cmake DESTINATION ${package_dir})
endforeach()
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/orrery-config.cmake.in
  ${PROJECT_BINARY_DIR}/orrery-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/orrery-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/orrery-config.cmake
  ${PROJECT_BINARY_DIR}/orrery-config-version.cmake
  ${PROJECT_SOURCE_DIR}/cmake/dependencies.cmake DESTINATION ${package_dir})

# For pkg-config. What the static library links goes to the private lists.
set(ORRERY_REQUIRES_PRIVATE libpcre2-8 libutf8proc libpng libjpeg)
set(ORRERY_LIBS_PRIVATE -ldnnl -fopenmp -pthread)
if(ORRERY_WITH_MEDIA)
  list(APPEND ORRERY_REQUIRES_PRIVATE ${ORRERY_FFMPEG_MODULES})
endif()
if(ORRERY_WITH_MPI)
  list(APPEND ORRERY_LIBS_PRIVATE ${MPI_CXX_LIBRARIES})
endif()
if(ORRERY_WITH_CUDA)
  list(APPEND ORRERY_LIBS_PRIVATE ${CUDA_cudart_LIBRARY} ${CUBLASLT_LIBRARY} ${CUDNN_LIBRARY})
endif()
if(ORRERY_WITH_NCCL)
  list(APPEND ORRERY_LIBS_PRIVATE ${NCCL_LIBRARY})
endif()
file(RELATIVE_PATH ORRERY_PREFIX_FROM_PC /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
list(JOIN ORRERY_REQUIRES_PRIVATE " " ORRERY_REQUIRES_PRIVATE)
list(JOIN ORRERY_LIBS_PRIVATE " " ORRERY_LIBS_PRIVATE)
configure_file(${PROJECT_SOURCE_DIR}/cmake/orrery.pc.in ${PROJECT_BINARY_DIR}/orrery.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/orrery.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/recipes DESTINATION ${data_dir})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/models DESTINATION ${data_dir})
install(FILES LICENSE NOTICE README.md CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})

if(ORRERY_PROGRAM)
  set_target_properties(orrery PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
  install(TARGETS orrery)
  # The program writes its own manual and completions, so that they name every flag.
  if(NOT CMAKE_CROSSCOMPILING)
    foreach(page "man orrery.1 ${CMAKE_INSTALL_MANDIR}/man1"
        "bash orrery ${CMAKE_INSTALL_DATADIR}/bash-completion/completions"
        "zsh _orrery ${CMAKE_INSTALL_DATADIR}/zsh/site-functions")
      separate_arguments(page UNIX_COMMAND ${page})
      list(GET page 0 kind)
      list(GET page 1 name)
      list(GET page 2 folder)
      set(file ${PROJECT_BINARY_DIR}/reference/${kind}/${name})
      install(CODE "
        file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/reference/${kind})
        execute_process(COMMAND $<TARGET_FILE:orrery> reference ${kind} OUTPUT_FILE ${file}
                        COMMAND_ERROR_IS_FATAL ANY)")
      install(FILES ${file} DESTINATION ${folder})
    endforeach()
  endif()
endif()
