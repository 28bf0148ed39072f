"""The formats that weights come and go in: one name table each. Between them stand the published
parameter names.
"""
