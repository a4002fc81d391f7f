"""Pure planning on shapes and integers: parts, block grid, fragments, owners, copies, traffic.

Nothing here needs torch or a process group, so the plan of any rank of a thousand can be made in a unit test.
"""
