#error "what is for floats is not compiled"
