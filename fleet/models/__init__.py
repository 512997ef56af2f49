"""Model families: everything that knows one checkpoint format, one package per family."""
