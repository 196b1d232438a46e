"""The browser: a static site of stored episodes, for any trajectory files of the contract."""
