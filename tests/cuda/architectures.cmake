# cmake -P: what is compiled by default, by the compiler's version.
include(${CMAKE_CURRENT_LIST_DIR}/../../cmake/cuda.cmake)

function(expect version expected)
  rewy_default_architectures("${version}" found)
  if(NOT found STREQUAL expected)
    message(SEND_ERROR "nvcc ${version}: expected ${expected}, got ${found}")
  endif()
endfunction()
expect(13.0 "80-real;90a-real;90-virtual;120-real")
expect(12.8 "80-real;90a-real;90-virtual;120-real")
expect(12.6 "80-real;90a-real;90-virtual")
