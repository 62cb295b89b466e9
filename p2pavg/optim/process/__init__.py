"""The process in which an optimizer lives: signals, notices of the cloud, and who was started with it.

Start reading at `sigterm`, which lets optimizers leave; `spot` asks whether a cloud takes the machine, and
`company` waits for peers that a launcher started at the same time. Imports nothing of `optim`.
"""
