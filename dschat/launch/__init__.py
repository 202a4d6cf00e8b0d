"""Behind train.py: selects steps, finds machines, resumes, and supervises the step processes."""
