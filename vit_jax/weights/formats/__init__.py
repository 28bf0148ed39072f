"""The file formats of weights, with one name table each. All are converted from and to the
published parameter names.
"""
