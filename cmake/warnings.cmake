# Warnings of everything built below this project. A parent project's targets, and the library where it is a
# subproject, keep the parent's own choice.
if(PROJECT_IS_TOP_LEVEL)
  set(cxx_warnings -Wall -Wextra -Wpedantic -Wextra-semi -Wnon-virtual-dtor -Woverloaded-virtual -Wundef)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${cxx_warnings}>")
  # A constructor's parameter may have its member's name: GCC's plain -Wshadow minds, Clang's doesn't.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:$<IF:$<CXX_COMPILER_ID:GNU>,-Wshadow=local,-Wshadow>>)
  # GCC 12 sees overlapping copies in std::string's operator+ (its bug 105651).
  add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>)
  # Nothing pedantic: the code that nvcc hands on to the host compiler is not. And a constant of a kernel's Config that
  # only some instances use is no mistake (177).
  add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra;--diag-suppress=177>")
endif()
if(REWY_WERROR)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Werror> "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>")
endif()
