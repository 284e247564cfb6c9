"""The methods of LLM. They convert arguments to items of tasks, and results of tasks to answers.

arguments  arguments to items
keywords   types of the methods' keywords, for editors and type checkers (generated)
running    makes each task once, and runs it
numbers    embed, rerank, classify, decide, calibrate, score
tables     the same methods on DataFrames and other tables
texts      generate, chat, stream, agenerate, astream
streams    coroutines that wait for an engine's answers
"""
