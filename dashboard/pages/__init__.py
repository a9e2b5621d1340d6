"""Pages: each reads the selection, asks for tables and hands them to figures. `render()` draws one."""
