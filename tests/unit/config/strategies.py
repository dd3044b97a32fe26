"""What hypothesis draws for more than one test of the configuration."""

from hypothesis import strategies as st


def _is_folder_name(text):
    return bool(text.strip()) and text not in (".", "..") and not any(part in text for part in ("/", "\\", "${"))


FOLDER_NAMES = st.text(max_size=12).filter(_is_folder_name)  # what run.name takes, references left out
