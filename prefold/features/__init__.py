"""Features that most users never meet. Each is a package with a module `attach` that registers it in the core's tables.

The core names no feature; `prefold.spec.plugins` imports them all. A feature may import from every folder except
`serve` and `cli`.
"""
