"""Decision heads, a file each: they score the options of a question by the hidden states of its prompt. No torch."""
