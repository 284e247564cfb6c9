"""Records what jobs and servers answer, so that it can be compared with what they answer after a change.

    python -m tests.record --out /tmp/before                    all jobs and exchanges; some minutes
    python -m tests.record --out /tmp/try --only 'text/tei-*'   a part of them
    python -m tests.record --compare /tmp/before /tmp/after     what differs; exit status 1 where anything does

Prefold is asked as its users ask: by its command line, over HTTP, and by `from prefold import LLM`. Models are tiny,
random and the same each time. A recording is a folder with a file for each job (`jobs/NAME`) and for each exchange
(`SERVER/NAME`). What cannot be equal is written as a word: <id 1>, <time>, <port>, <seconds>, <folder>.

`jobs.py` and `exchanges.py` are the tables, `models.py` makes the models, `running.py` runs it all (in the
processes of `tests/support/forked.py`), `normal.py` says what cannot be equal, and compares.
"""
