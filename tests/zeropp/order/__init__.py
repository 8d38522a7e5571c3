"""A checker of order: records what a program does on streams, and finds what no stream is made to wait for.

trace.py says what a program did, recorder.py writes that down, races.py reads it; programs.py has what is checked.
"""
