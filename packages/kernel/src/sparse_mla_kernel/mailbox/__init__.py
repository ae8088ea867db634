"""A rank's mailbox: where its words lie, what they may be, and how long a wait for one lasts."""
