"""A small byte-level transformer, its training loop and a long-document comparison, with a text to run them on."""
