"""What can be asked of prefold, as frozen dataclasses. An option is a field with type, default, bounds and help.

fields  how a field is declared, and how values are checked
task    the options of each task           model   the options of a model
job     a job as a whole: its input, its output, and what computes it
server  the options of a server        requests  requests to an engine, and their results

and what every layer asks of the machine and the user: environment variables, the limits of a container, files, plugins.

The command line, the keywords of Python, the bodies of HTTP, the journal of a job and the reference pages are made from
these fields. Only the standard library and `prefold.errors` are imported here.
"""
