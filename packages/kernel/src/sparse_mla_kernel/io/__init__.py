"""What crosses a kernel's border: cache rows in, the query in, merged rows out.

A query comes out of a tensor or out of a mailbox; a merged row goes into a tensor or into the
mailbox of the rank that owns the head. A kernel is written against these four and knows no mode.
"""
