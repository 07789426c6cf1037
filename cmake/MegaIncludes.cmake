# What a source file needs, read from its includes: a program that includes a header of nlohmann-json,
# directly or through a mega header, links mega::json. So that adding a program or a test is adding a
# file, and no list of libraries can go stale.

# Pattern of an outside header and the component that provides it.
set(MEGA_PROVIDERS
    "^nlohmann/" json
    "^xxhash\\.h$" ckpt
    "^cblas\\.h$" blas
    "^mpi\\.h$" mpi
    "^range/v3/" ranges
    "^(cuda|cuda_runtime|cuda_runtime_api|cuda_bf16|cudaTypedefs|cublas_v2|cublasLt)\\.h$" cuda
    "^cudnn(_graph)?\\.h$" cudnn
    "^nccl\\.h$" nccl
    "^CLI/" cli
    "^benchmark/" benchmark
    "^zlib\\.h$" zlib)

# Components that only programs, tests and benchmarks use, never the library.
macro(mega_find_build_component name)
  if(NOT TARGET mega::${name})
    if("${name}" STREQUAL "cli")
      find_package(CLI11 CONFIG QUIET GLOBAL)
      if(TARGET CLI11::CLI11)
        mega_define_component(cli CLI11::CLI11)
      endif()
    elseif("${name}" STREQUAL "benchmark")
      find_package(benchmark CONFIG QUIET GLOBAL)
      if(TARGET benchmark::benchmark)
        mega_define_component(benchmark benchmark::benchmark)
      endif()
    elseif("${name}" STREQUAL "zlib")
      find_package(ZLIB QUIET GLOBAL)
      if(TARGET ZLIB::ZLIB)
        mega_define_component(zlib ZLIB::ZLIB)
      endif()
    else()
      mega_find_component(${name})
    endif()
  endif()
endmacro()

# mega_components_of(<out> <file>...): the components that the files reach through their includes.
# Includes of mega are followed; conditional ones count, but those under #ifdef MEGA_WITH_NAME only
# where the component `name` is there, which defines that.
function(mega_components_of out)
  set(open ${ARGN})
  set(seen)
  set(components)
  while(open)
    list(POP_FRONT open file)
    get_filename_component(file ${file} ABSOLUTE)
    if(file IN_LIST seen OR NOT EXISTS ${file})
      continue()
    endif()
    list(APPEND seen ${file})
    string(FIND ${file} ${PROJECT_SOURCE_DIR}/include/ in_library)
    if(NOT in_library EQUAL 0)
      set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
    endif()
    get_filename_component(folder ${file} DIRECTORY)
    file(STRINGS ${file} lines REGEX "^[ \t]*#[ \t]*(include[ \t]*[<\"]|if|el|endif)")
    set(conditions)
    foreach(line IN LISTS lines)
      if(line MATCHES "# *ifdef +MEGA_WITH_(CUDNN|NCCL)")
        string(TOLOWER ${CMAKE_MATCH_1} condition)
        mega_find_build_component(${condition})
        if(TARGET mega::${condition})
          list(APPEND conditions holds)
        else()
          list(APPEND conditions fails)
        endif()
      elseif(line MATCHES "# *if")
        list(APPEND conditions holds)
      elseif(line MATCHES "# *el")
        list(POP_BACK conditions)
        list(APPEND conditions holds)
      elseif(line MATCHES "# *endif")
        list(POP_BACK conditions)
      endif()
      if("fails" IN_LIST conditions OR NOT line MATCHES "include[ \t]*([<\"])([^>\"]+)[>\"]")
        continue()
      endif()
      set(header ${CMAKE_MATCH_2})
      if(CMAKE_MATCH_1 STREQUAL "\"")
        get_filename_component(local ${folder}/${header} ABSOLUTE)
        if(EXISTS ${local})
          list(APPEND open ${local})
        else()
          list(APPEND open ${PROJECT_SOURCE_DIR}/${header})
        endif()
      elseif(header MATCHES "^mega/")
        list(APPEND open ${PROJECT_SOURCE_DIR}/include/${header})
      else()
        set(providers ${MEGA_PROVIDERS})
        while(providers)
          list(POP_FRONT providers pattern component)
          if(header MATCHES "${pattern}")
            list(APPEND components ${component})
          endif()
        endwhile()
      endif()
    endforeach()
  endwhile()
  list(REMOVE_DUPLICATES components)
  set(${out} "${components}" PARENT_SCOPE)
endfunction()

# mega_missing_components(<out> <component>...): those of the components whose packages are absent.
function(mega_missing_components out)
  set(missing)
  foreach(component IN LISTS ARGN)
    mega_find_build_component(${component})
    if(NOT TARGET mega::${component} OR (component STREQUAL "cuda" AND NOT MEGA_WITH_CUDA))
      list(APPEND missing ${component})
    endif()
  endforeach()
  set(${out} "${missing}" PARENT_SCOPE)
endfunction()

# Says what is left out for want of packages; stops instead with MEGA_REQUIRE_PACKAGES, unless the
# component was switched off on purpose.
function(mega_leave_out what)
  set(unwanted ${MEGA_WITHOUT})
  if(NOT MEGA_WITH_CUDA)
    list(APPEND unwanted cuda cudnn nccl)
  endif()
  set(wanted ${ARGN})
  list(REMOVE_ITEM wanted ${unwanted})
  list(JOIN ARGN ", " missing)
  if(wanted AND MEGA_REQUIRE_PACKAGES)
    message(FATAL_ERROR "mega: ${what} needs ${missing}; cmake/mega-components.cmake names the packages")
  endif()
  message(STATUS "mega: ${what} needs ${missing}; left out")
endfunction()
