# Several sources compiled as one. What a source that uses a header-only library costs is the library:
# every test that calls an importer compiles all of it again; ten such tests in one source, once.
#
#   mega_combine_tests(<out> <stem> <source>...)    sources that share nothing but headers
#   mega_combine_parts(<out> <stem> <source>...)    of the sources of one program the .cu files
#
# set <out> to generated sources, named after the stem, that include the given ones; without
# MEGA_COMBINE to the given ones.
#
# The price: a source that lacks an include may find it in its neighbour's, and a changed source compiles
# its neighbours again. So it is for a run of all tests, not for work on one.
option(MEGA_COMBINE "Compile several tests, or the .cu files of a program, as one" OFF)
set(MEGA_COMBINED_TESTS 10 CACHE STRING "At most so many tests are compiled as one with MEGA_COMBINE")
mark_as_advanced(MEGA_COMBINED_TESTS)

# Lines at the margin that must be at global scope, reach into the next source, or choose headers: a
# test with one of them is compiled by itself.
set(MEGA_STANDS_ALONE
    "^(namespace [A-Za-z0-9_:]+ {|template ?<>|extern |# *define|# *if.*(MEGA_|__has_include))")

# mega_write_combined(<out> <name> <text>): appends the file to the list <out>.
function(mega_write_combined out name text)
  set(file ${CMAKE_CURRENT_BINARY_DIR}/combined/${name})
  file(CONFIGURE OUTPUT ${file} CONTENT "${text}" @ONLY)
  set(${out} ${${out}} ${file} PARENT_SCOPE)
endfunction()

# All headers come first, and each source then stands in a namespace of its own, so that helpers may
# have equal names; there its headers are passed over, since they were seen.
function(mega_combine_tests out stem)
  set(combined)
  set(together)
  foreach(source IN LISTS ARGN)
    file(STRINGS ${source} alone REGEX "${MEGA_STANDS_ALONE}" LIMIT_COUNT 1)
    if(alone OR NOT MEGA_COMBINE)
      list(APPEND combined ${source})
    else()
      list(APPEND together ${source})
    endif()
  endforeach()
  # As few as may be, of equal sizes.
  list(LENGTH together left)
  math(EXPR number "(${left} + ${MEGA_COMBINED_TESTS} - 1) / ${MEGA_COMBINED_TESTS}")
  while(number GREATER 0)
    list(LENGTH together left)
    math(EXPR size "(${left} + ${number} - 1) / ${number}")
    list(SUBLIST together 0 ${size} some)
    list(REMOVE_ITEM together ${some})
    math(EXPR number "${number} - 1")
    if(size EQUAL 1)
      list(APPEND combined ${some})
      continue()
    endif()
    set(headers)
    set(bodies)
    foreach(source IN LISTS some)
      get_filename_component(folder ${source} DIRECTORY)
      get_filename_component(extension ${source} LAST_EXT)
      file(STRINGS ${source} includes REGEX "^#include ")
      foreach(include IN LISTS includes)
        if(include MATCHES "\"(.+)\"")
          get_filename_component(header ${CMAKE_MATCH_1} ABSOLUTE BASE_DIR ${folder})
          if(EXISTS ${header})
            set(include "#include \"${header}\"")
          endif()
        endif()
        list(APPEND headers ${include})
      endforeach()
      list(LENGTH bodies place)
      list(APPEND bodies "namespace source_${place} {\n#include \"${source}\"\n}\n")
    endforeach()
    list(REMOVE_DUPLICATES headers)
    list(JOIN headers "\n" headers)
    list(JOIN bodies "" bodies)
    mega_write_combined(combined ${stem}_${number}${extension} "${headers}\n\n${bodies}")
  endwhile()
  set(${out} "${combined}" PARENT_SCOPE)
endfunction()

# The .cpp files of a program stay as they are: what is a name of their own in one would shadow another's.
function(mega_combine_parts out stem)
  set(combined ${ARGN})
  set(parts ${ARGN})
  list(FILTER parts INCLUDE REGEX "\\.cu$")
  list(LENGTH parts count)
  if(MEGA_COMBINE AND count GREATER 1)
    list(FILTER combined EXCLUDE REGEX "\\.cu$")
    list(TRANSFORM parts REPLACE ".+" "#include \"\\0\"")
    list(JOIN parts "\n" text)
    mega_write_combined(combined ${stem}.cu "${text}\n")
  endif()
  set(${out} "${combined}" PARENT_SCOPE)
endfunction()
