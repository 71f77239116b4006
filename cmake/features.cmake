# Parts of the library that may be absent. ORRERY_<NAME> says what is wanted: AUTO takes a part where
# its libraries are found, ON demands it, OFF leaves it out. ORRERY_WITH_<NAME> says what is built.

# orrery_feature(NAME VARIABLES...): decides ORRERY_WITH_NAME; the part was found when every
# variable is true. `lost` is what the library does without it.
macro(orrery_feature name needs lost)
  set(ORRERY_WITH_${name} ON)
  foreach(variable ${ARGN})
    if(NOT ${variable})
      set(ORRERY_WITH_${name} OFF)
    endif()
  endforeach()
  if(ORRERY_WITH_${name})
    message(STATUS "ORRERY_${name}: yes")
  elseif(ORRERY_${name} STREQUAL "AUTO" OR NOT ORRERY_${name})
    message(STATUS "ORRERY_${name}: no (${lost})")
  else()
    message(FATAL_ERROR "ORRERY_${name}=${ORRERY_${name}} needs ${needs}, which was not found. "
                        "Install it, or configure with -DORRERY_${name}=OFF.")
  endif()
endmacro()

foreach(option
    "MEDIA;FFmpeg: videos and sound in containers"
    "MPI;Ranks as MPI processes"
    "CUDA;CUDA backend with kernels for sm_90a, cuBLASLt and cuDNN"
    "NCCL;Ranks on several CUDA devices")
  list(POP_FRONT option name)
  set(ORRERY_${name} AUTO CACHE STRING "${option} (AUTO, ON or OFF)")
  set_property(CACHE ORRERY_${name} PROPERTY STRINGS AUTO ON OFF)
endforeach()

find_package(PkgConfig REQUIRED)
set(ORRERY_FFMPEG_MODULES libavcodec libavfilter libavformat libavutil libswscale libswresample)
if(ORRERY_MEDIA)
  pkg_check_modules(ORRERY_FFMPEG QUIET IMPORTED_TARGET ${ORRERY_FFMPEG_MODULES})
endif()
orrery_feature(MEDIA "FFmpeg's development files (${ORRERY_FFMPEG_MODULES})" "videos are refused"
               ORRERY_MEDIA ORRERY_FFMPEG_FOUND)

if(ORRERY_MPI)
  find_package(MPI QUIET COMPONENTS CXX)
endif()
orrery_feature(MPI "an MPI library such as Open MPI" "mpirun is refused" ORRERY_MPI MPI_CXX_FOUND)

if(ORRERY_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  find_package(CUDAToolkit 13.0 QUIET)
  find_library(CUDNN_LIBRARY NAMES cudnn libcudnn.so.9 HINTS ${CUDAToolkit_LIBRARY_DIR})
  find_path(CUDNN_INCLUDE cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_library(CUBLASLT_LIBRARY NAMES cublasLt libcublasLt.so.13 HINTS ${CUDAToolkit_LIBRARY_DIR})
endif()
orrery_feature(CUDA "nvcc, the CUDA toolkit 13, cuBLASLt and cuDNN 9" "--device cuda is refused"
               ORRERY_CUDA CMAKE_CUDA_COMPILER CUDAToolkit_FOUND CUDNN_LIBRARY CUDNN_INCLUDE
               CUBLASLT_LIBRARY)

if(ORRERY_NCCL AND ORRERY_WITH_CUDA)
  find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${CUDAToolkit_LIBRARY_DIR})
  find_path(NCCL_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
endif()
orrery_feature(NCCL "the CUDA backend and NCCL" "ranks on CUDA devices are refused"
               ORRERY_NCCL ORRERY_WITH_CUDA NCCL_LIBRARY NCCL_INCLUDE)
