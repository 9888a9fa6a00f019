"""Tokenizers: WordPiece, byte-level BPE and unigram, our files and those of other libraries."""
