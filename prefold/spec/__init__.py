"""All options and requests, as frozen dataclasses. An option is a field with a type, a default, bounds and a help text.

    fields       how a field is declared, and how values are checked
    task         options of each task
    model        options of a model
    job          options of a job: input, output, backend and replicas
    server       options of a server
    requests     requests to an engine, and their results
    calibration  temperatures and thresholds of decisions
    environment, container, files, plugins   shared by all layers

The command line, Python's keywords, HTTP bodies, a job's journal and the reference pages are made from the fields.
This package imports only the standard library and `prefold.errors`.
"""
