"""The training state on its way to newcomers and into checkpoints: snapshots, donors, downloads, files.

May import `rounds.machine`, `rounds.training`, `rounds.protocol` and the floors below `rounds`.
Start reading at `manifest`, then `donor` and `downloader`.
"""
