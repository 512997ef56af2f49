"""Function calls in the text of answers: the forms in which model families write them, their
parser, the grammars that enforce them, and their place in prompts. Knows no HTTP.
"""
