"""Holds the methods of LLM, which turn arguments into items of tasks, and results of tasks into answers.

arguments   reads what callers hand over, as items of the tasks
keywords    names the keywords of the methods, for editors and type checkers
running     makes each task once, and runs it
numbers     has embed, rerank, classify and score
streams     has coroutines that wait for the answers of an engine
texts       has generate, chat and stream, and agenerate and astream for event loops
"""
