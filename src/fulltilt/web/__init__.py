"""What pages and servers of several rooms share: who is let in, where they listen, style sheets, libraries."""
