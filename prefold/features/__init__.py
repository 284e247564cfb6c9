"""Features that most users never meet, each in a package whose module `attach` enters it in the tables of the core.

The core names no feature; `prefold.spec.plugins` imports all of them. A feature may import from any folder but `serve`
and `cli`.
"""
