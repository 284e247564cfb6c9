"""Decision heads, one per file: they score the options of a question from hidden states of its prompt. No torch."""
