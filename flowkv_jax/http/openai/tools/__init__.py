"""Calls of functions, read out of an answer's text while it comes. Pure.

A parser is fed pieces of text and says what they mean, in linear time: text for the reader, the
beginning of a call with its name, more of a call's arguments. Where the pieces are cut changes
nothing but where what is said is cut.
"""
