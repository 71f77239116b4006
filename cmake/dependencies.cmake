# What every build of the library needs. An installed static library needs the same and reads this
# file again; nothing is vendored.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
find_package(PNG REQUIRED)
find_package(JPEG REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
pkg_check_modules(ORRERY_PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(ORRERY_UTF8PROC REQUIRED IMPORTED_TARGET libutf8proc)

# Not by Debian's dnnl-config.cmake: it demands OpenCL, which its package does not bring.
find_library(DNNL_LIBRARY dnnl REQUIRED)
find_path(DNNL_INCLUDE oneapi/dnnl/dnnl.hpp REQUIRED)
add_library(DNNL::dnnl UNKNOWN IMPORTED)
set_target_properties(DNNL::dnnl PROPERTIES IMPORTED_LOCATION ${DNNL_LIBRARY}
                      INTERFACE_INCLUDE_DIRECTORIES ${DNNL_INCLUDE})

# Libraries that the objects of orrery refer to.
set(ORRERY_LIBRARIES Threads::Threads PNG::PNG JPEG::JPEG OpenMP::OpenMP_CXX DNNL::dnnl
    PkgConfig::ORRERY_PCRE2 PkgConfig::ORRERY_UTF8PROC)
if(ORRERY_WITH_MEDIA)
  pkg_check_modules(ORRERY_FFMPEG REQUIRED QUIET IMPORTED_TARGET ${ORRERY_FFMPEG_MODULES})
  list(APPEND ORRERY_LIBRARIES PkgConfig::ORRERY_FFMPEG)
endif()
if(ORRERY_WITH_MPI)
  find_package(MPI REQUIRED QUIET COMPONENTS CXX)
  list(APPEND ORRERY_LIBRARIES MPI::MPI_CXX)
endif()
if(ORRERY_WITH_CUDA)
  find_package(CUDAToolkit 13.0 REQUIRED QUIET)
  list(APPEND ORRERY_LIBRARIES CUDA::cudart ${CUBLASLT_LIBRARY} ${CUDNN_LIBRARY})
endif()
if(ORRERY_WITH_NCCL)
  list(APPEND ORRERY_LIBRARIES ${NCCL_LIBRARY})
endif()
