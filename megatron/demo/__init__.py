"""The demo behind `make demo`, and what it needs to read and draw the log of any Megatron run.

- `training_log`, `curves`: Megatron's log lines and TensorBoard files as numbers.
- `figure`: loss curves as a PNG.
- `process`, `display`: a launcher as a child process, and its progress on the terminal.
- `folders`, `session`: what a demo leaves where, and its course.
"""
