"""The page a person looks at: one self-contained HTML file for a run, or for several runs side by side.

``gather`` reads runs, ``single`` and ``compare`` turn them into sections, ``page`` writes the file. The scripts and the
style beside these modules are inlined into it; a page asks for nothing.
"""
