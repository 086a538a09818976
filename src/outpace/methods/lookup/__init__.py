"""Methods that copy from text: the prompt, the output, references, a corpus, or tables learned from them."""
