# Which CUDA compiler serves, and what it compiles for. C++20 needs nvcc 12.0.
set(rewy_least_nvcc 12.0)

# Machine code for Ampere and Hopper, and PTX, which later GPUs compile: from nvcc 12.8 on also machine code for
# Blackwell's 12.x.
function(rewy_default_architectures nvcc_version out)
  if(nvcc_version VERSION_GREATER_EQUAL 12.8)
    set(${out} 80-real 90a-real 90-virtual 120-real PARENT_SCOPE)
  else()
    set(${out} 80-real 90a-real 90-virtual PARENT_SCOPE)
  endif()
endfunction()

# Whether there is one to build with, where nobody asked for it.
function(rewy_find_cuda out)
  set(${out} OFF PARENT_SCOPE)
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    return()
  endif()
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE text ERROR_QUIET)
  if(text MATCHES "release ([0-9]+\\.[0-9]+)" AND CMAKE_MATCH_1 VERSION_LESS rewy_least_nvcc)
    message(STATUS "nvcc ${CMAKE_MATCH_1} is older than ${rewy_least_nvcc}: no CUDA backend")
  else()
    set(${out} ON PARENT_SCOPE)
  endif()
endfunction()
