# Programs by folder: a folder that exists becomes a target, and a target links what it includes.
#
#   examples/NN_name/main.cpp  -> example_NN_name  build/bin/NN_name     (likewise NN_name-cuda)
#   examples/gpt3/main.cpp     -> mega-gpt3        build/bin/mega-gpt3   (likewise llama3, gpt3-cuda)
#   tools/NAME/main.cpp        -> NAME             build/bin/NAME
#   benchmarks/NAME.cpp        -> bench_NAME       build/bin/bench_NAME  (likewise NAME.cu)
#
# The other .cpp and .cu files of a program's folder belong to it, and those of benchmarks/gpu to
# benchmarks/gpu_step.cu. .cu files are compiled only with MEGA_WITH_CUDA; the target cuda_programs
# builds what has them. With MEGA_COMBINE the .cu files of a program are compiled as one.
include(MegaCombine)
include(MegaIncludes)

if(MEGA_WITH_CUDA)
  add_custom_target(cuda_programs)
endif()

# Flags of everything that is built here; nothing of it reaches a user of mega::mega.
add_library(mega_build_flags INTERFACE)
if(CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
  set(host_flags -Wall -Wextra -Wpedantic -Wshadow)
  if(MEGA_WERROR)
    list(APPEND host_flags -Werror)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      # g++ 12 raises these in its own standard headers once it inlines; they stay warnings.
      list(APPEND host_flags -Wno-error=array-bounds -Wno-error=maybe-uninitialized
           -Wno-error=restrict -Wno-error=stringop-overflow -Wno-error=stringop-overread
           -Wno-error=free-nonheap-object)
    endif()
  endif()
  if(MEGA_NATIVE)
    list(APPEND host_flags -march=native)
  endif()
  if(MEGA_SANITIZE)
    list(APPEND host_flags -fsanitize=${MEGA_SANITIZE} -fno-omit-frame-pointer
         -fno-sanitize-recover=all)
    target_link_options(mega_build_flags INTERFACE -fsanitize=${MEGA_SANITIZE})
  endif()
  target_compile_options(mega_build_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${host_flags}>")
endif()

# mega_add_executable(<target> <source>...): builds the sources with what they include. Sets
# <target>_MISSING in the caller, and defines nothing, when a package is absent.
function(mega_add_executable target)
  mega_components_of(components ${ARGN})
  mega_missing_components(missing ${components})
  set(${target}_MISSING "${missing}" PARENT_SCOPE)
  if(missing)
    mega_leave_out("${target}" ${missing})
    return()
  endif()
  add_executable(${target} ${ARGN})
  target_compile_features(${target} PRIVATE cxx_std_20)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF)
  list(TRANSFORM components PREPEND "mega::")
  target_link_libraries(${target} PRIVATE mega::mega ${components} mega_build_flags)
  if("${ARGN}" MATCHES "\\.cu(;|$)" AND TARGET cuda_programs)
    add_dependencies(cuda_programs ${target})
  endif()
endfunction()

function(mega_add_program target name folder)
  file(GLOB sources CONFIGURE_DEPENDS ${folder}/*.cpp)
  if(MEGA_WITH_CUDA)
    file(GLOB device_sources CONFIGURE_DEPENDS ${folder}/*.cu)
    list(APPEND sources ${device_sources})
  endif()
  mega_combine_parts(sources ${target} ${sources})
  mega_add_executable(${target} ${sources})
  if(TARGET ${target})
    set_target_properties(${target} PROPERTIES
                          OUTPUT_NAME ${name} RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
    add_dependencies(programs ${target})
  endif()
endfunction()

# Every program below examples/ and tools/, and the target `programs` that builds them all.
function(mega_add_programs)
  add_custom_target(programs)
  file(GLOB mains CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/examples/*/main.c*
       ${PROJECT_SOURCE_DIR}/tools/*/main.c*)
  foreach(main IN LISTS mains)
    get_filename_component(folder ${main} DIRECTORY)
    get_filename_component(name ${folder} NAME)
    if(main MATCHES "\\.cu$" AND NOT MEGA_WITH_CUDA)
      message(STATUS "mega: ${name} needs MEGA_WITH_CUDA=ON; left out")
    elseif(folder MATCHES "/tools/[^/]*$")
      mega_add_program(${name} ${name} ${folder})
    elseif(name MATCHES "^[0-9]+_")
      mega_add_program(example_${name} ${name} ${folder})
    else()
      mega_add_program(mega-${name} mega-${name} ${folder})
    endif()
  endforeach()
endfunction()

# One program for each benchmarks/*.cpp, and the target `benchmarks` that builds them all.
function(mega_add_benchmarks)
  add_custom_target(benchmarks)
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/benchmarks/*.cpp)
  if(MEGA_WITH_CUDA)
    file(GLOB device_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/benchmarks/*.cu)
    list(APPEND sources ${device_sources})
  endif()
  foreach(source IN LISTS sources)
    get_filename_component(name ${source} NAME_WE)
    set(parts)
    if(name STREQUAL "gpu_step")
      file(GLOB parts CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/benchmarks/gpu/*.cu)
    endif()
    mega_combine_parts(parts bench_${name} ${source} ${parts})
    mega_add_executable(bench_${name} ${parts})
    if(TARGET bench_${name})
      # Their includes of their own parts and of the trainers' choices are paths from the root.
      target_include_directories(bench_${name} PRIVATE ${PROJECT_SOURCE_DIR})
      set_target_properties(bench_${name} PROPERTIES
                            RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
      add_dependencies(benchmarks bench_${name})
    endif()
  endforeach()
endfunction()
