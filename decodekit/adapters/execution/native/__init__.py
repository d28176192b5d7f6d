"""A whole pass in C++: the matrix products, the attention and all that lies between them.

``pass.h`` says what is computed, ``build`` compiles it once for a machine, ``library`` calls it.
"""
