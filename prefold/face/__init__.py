"""The methods of LLM: arguments in, answers out.

arguments   what callers hand over, as items of the tasks
results     what they get back
running     tasks, made once and run
numbers     embed, rerank, classify, score
texts       generate, chat, stream, and the same from an event loop
"""
