# Warnings of everything built below this project. A parent project's targets, and the library where it is a
# subproject, keep the parent's own choice.
if(PROJECT_IS_TOP_LEVEL)
  add_compile_options(-Wall -Wextra -Wpedantic -Wextra-semi -Wnon-virtual-dtor -Woverloaded-virtual -Wundef)
  # A constructor's parameter may have its member's name: GCC's plain -Wshadow minds, Clang's doesn't.
  add_compile_options($<IF:$<CXX_COMPILER_ID:GNU>,-Wshadow=local,-Wshadow>)
  # GCC 12 sees overlapping copies in std::string's operator+ (its bug 105651).
  add_compile_options($<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)
endif()
if(REWY_WERROR)
  add_compile_options(-Werror)
endif()
