"""Arrays that span several meshes become pieces.

In: a `Function` some of whose arguments are divided along a dimension, as layers that are stacked for a scan
are, with a piece on each of several meshes. Out: a `Function` over the pieces, each of which is on one mesh.
Always: it computes what it did, and no piece is put together with another; where that would be needed, it is
refused. Read `divide.py` first, then `writer.py`; `links.py` has what is known of each primitive.
"""
