"""A live page about something that is told once a second as JSON: files, server-sent events, history.

May import `errors` alone, and knows nothing of swarms but the names of the fields that `timeline` keeps.
Start reading at `server`, then `broadcast` (who is told what) and `timeline` (what was); `access` decides who
may look. The page itself, HTML, CSS and JavaScript, is in `page/`; there `main.js` is first.
"""
