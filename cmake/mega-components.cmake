# The optional parts of mega and the packages that they stand on. This one file serves the build tree
# and the installed package, so that a component is found by the same rules in both.
#
#   mega_find_component(<name>)   defines the target mega::<name> when its packages are there
#
# | component | headers                          | packages (Debian)                   |
# |-----------|----------------------------------|-------------------------------------|
# | threads   | all                              | none: the system's thread library   |
# | json      | data/jsonl.hpp                   | nlohmann-json3-dev                  |
# | ckpt      | ckpt/                            | nlohmann-json3-dev, libxxhash-dev   |
# | blas      | nn/blas.hpp                      | libopenblas-dev, or another CBLAS   |
# | mpi       | comm/mpi.hpp                     | libopenmpi-dev, openmpi-bin         |
# | ranges    | ranges/                          | librange-v3-dev                     |
# | scan      | scan/import.hpp, what reads and  | zlib1g-dev, libprotozero-dev        |
# |           | writes files of traces           |                                     |
# | cuda      | cuda/, nn/cublas*.hpp, all .cuh  | NVIDIA's CUDA toolkit               |
# | cudnn     | nn/cudnn_attention.hpp           | NVIDIA's cuDNN 9                    |
# | nccl      | comm/nccl.hpp                    | NVIDIA's NCCL                       |
#
# cudnn and nccl define MEGA_WITH_CUDNN and MEGA_WITH_NCCL for what links them. CMAKE_PREFIX_PATH
# may name where they are, such as the folders nvidia/cudnn and nvidia/nccl of Python packages.
include_guard(GLOBAL)
set(MEGA_COMPONENTS threads json ckpt blas mpi ranges scan cuda cudnn nccl)

# mega::<name> is an imported target, so that nothing of this machine's paths is exported.
function(mega_define_component name)
  add_library(mega::${name} INTERFACE IMPORTED GLOBAL)
  target_link_libraries(mega::${name} INTERFACE mega::mega ${ARGN})
endfunction()

# For packages that ship no CMake configuration: a header and, where given, a library.
function(mega_find_plain_package target header)
  if(TARGET ${target})
    return()
  endif()
  string(MAKE_C_IDENTIFIER "MEGA_${header}_DIR" directory)
  find_path(${directory} ${header} PATH_SUFFIXES openblas openblas-pthread
            HINTS ${CUDAToolkit_INCLUDE_DIRS})
  if(NOT ${directory})
    return()
  endif()
  set(library)
  if(ARGN)
    string(MAKE_C_IDENTIFIER "MEGA_${header}_LIBRARY" library)
    find_library(${library} NAMES ${ARGN} HINTS ${CUDAToolkit_LIBRARY_DIR})
    if(NOT ${library})
      return()
    endif()
  endif()
  mark_as_advanced(${directory} ${library})
  add_library(${target} INTERFACE IMPORTED GLOBAL)
  target_include_directories(${target} SYSTEM INTERFACE ${${directory}})
  if(library)
    target_link_libraries(${target} INTERFACE ${${library}})
  endif()
endfunction()

# For a library of NVIDIA's that stands beside the toolkit or elsewhere. A Python package of it has
# the library under its full name alone.
macro(mega_find_nvidia_component name header library version)
  mega_find_component(cuda)
  if(TARGET mega::cuda)
    find_package(CUDAToolkit QUIET)
    mega_find_plain_package(mega::${name}_library ${header} ${library} lib${library}.so.${version})
    if(TARGET mega::${name}_library)
      string(TOUPPER ${name} switch)
      mega_define_component(${name} mega::cuda mega::${name}_library)
      target_compile_definitions(mega::${name} INTERFACE MEGA_WITH_${switch})
    endif()
  endif()
endmacro()

# A macro, since find_package must see the caller's scope.
macro(mega_find_component name)
  if(NOT TARGET mega::${name} AND NOT "${name}" IN_LIST MEGA_WITHOUT)
    if("${name}" STREQUAL "threads")
      mega_define_component(threads Threads::Threads)
    elseif("${name}" STREQUAL "json")
      find_package(nlohmann_json 3.9 CONFIG QUIET GLOBAL)
      if(TARGET nlohmann_json::nlohmann_json)
        mega_define_component(json nlohmann_json::nlohmann_json)
      endif()
    elseif("${name}" STREQUAL "ckpt")
      mega_find_component(json)
      mega_find_plain_package(mega::xxhash xxhash.h xxhash)
      if(TARGET mega::json AND TARGET mega::xxhash)
        mega_define_component(ckpt mega::json mega::xxhash)
      endif()
    elseif("${name}" STREQUAL "blas")
      mega_find_plain_package(mega::cblas cblas.h openblas cblas)
      if(TARGET mega::cblas)
        mega_define_component(blas mega::cblas)
      endif()
    elseif("${name}" STREQUAL "mpi")
      if(NOT TARGET MPI::MPI_CXX)
        # The C interface only: the library never uses MPI's removed C++ bindings.
        set(MPI_CXX_SKIP_MPICXX ON)
        find_package(MPI QUIET COMPONENTS CXX)
      endif()
      if(TARGET MPI::MPI_CXX)
        set_target_properties(MPI::MPI_CXX PROPERTIES IMPORTED_GLOBAL ON)
        mega_define_component(mpi MPI::MPI_CXX)
      endif()
    elseif("${name}" STREQUAL "ranges")
      mega_find_plain_package(mega::range_v3 range/v3/version.hpp)
      if(TARGET mega::range_v3)
        mega_define_component(ranges mega::range_v3)
      endif()
    elseif("${name}" STREQUAL "scan")
      find_package(ZLIB QUIET GLOBAL)
      mega_find_plain_package(mega::protozero protozero/pbf_writer.hpp)
      if(TARGET ZLIB::ZLIB AND TARGET mega::protozero)
        mega_define_component(scan ZLIB::ZLIB mega::protozero)
      endif()
    elseif("${name}" STREQUAL "cuda")
      find_package(CUDAToolkit QUIET GLOBAL)
      if(TARGET CUDA::cudart)
        mega_define_component(cuda CUDA::cudart CUDA::cublas CUDA::cublasLt)
      endif()
    elseif("${name}" STREQUAL "cudnn")
      mega_find_nvidia_component(cudnn cudnn_graph.h cudnn 9)
    elseif("${name}" STREQUAL "nccl")
      mega_find_nvidia_component(nccl nccl.h nccl 2)
    endif()
  endif()
endmacro()
