"""Operations whose best form depends on the platform, one a file."""
