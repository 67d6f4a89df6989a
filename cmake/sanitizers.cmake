# REWY_SANITIZE=address,undefined: in every target of the project; the first finding ends the program.
if(REWY_SANITIZE)
  add_compile_options(-fsanitize=${REWY_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${REWY_SANITIZE})
endif()
