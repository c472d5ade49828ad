"""Bench results as one HTML file, and as PNG plots.

page         the page from top to bottom, and the files that are written
verdict      what the figures mean, in words
tables       what to run, speed by setting and load, every cell
answers      answers side by side, where they differ, and which loop
trees        a tree of drafts as a picture, with the path that was taken
manifest     hardware, versions, command, commit, prompts, heads
plots        the figures
plot_style   how figures look: markers, lines, panels
markup       HTML out of text (template.html and style.css are the frame)
"""
